"""`register`, which vLLM calls once in each of its processes: it makes the connector known by its name."""


def register() -> None:
    """Register `VmmkvConnector` with vLLM. Cost: vLLM's factory is imported, and the connector when it is asked for."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector("VmmkvConnector", "vmmkv.adapters.vllm.connector", "VmmkvConnector")
