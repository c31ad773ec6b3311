"""`register`, which vLLM calls once in each of its processes: it makes the connector known, and elastic memory."""


def register() -> None:
    """Register `VmmkvConnector` with vLLM, and elastic memory. Cost: vLLM's factory and its engine are imported."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vmmkv.adapters.vllm.elastic import install

    KVConnectorFactory.register_connector("VmmkvConnector", "vmmkv.adapters.vllm.connector", "VmmkvConnector")
    install()
