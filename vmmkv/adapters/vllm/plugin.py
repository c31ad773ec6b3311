"""`register`, which vLLM calls in each of its processes: it makes the connector known by its name, and elastic memory."""

from typing import Any, Final

from vmmkv.adapters.tier_options import TierOptions

_NAME: Final = "VmmkvConnector"


def register() -> None:
    """Register `VmmkvConnector` with vLLM and have its options checked early, and let engines be elastic.

    vLLM asks for the class of the connector when it makes its configuration; it makes one only when the weights are loaded.
    Cost: vLLM's factory and its engine are imported, and the connector when it is asked for.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vmmkv.adapters.vllm.elastic import install

    found = KVConnectorFactory.get_connector_class

    def get_connector_class(cls: type, kv_transfer_config: Any) -> Any:
        if kv_transfer_config.kv_connector == _NAME:
            options_of(kv_transfer_config)
        return found(kv_transfer_config)

    KVConnectorFactory.register_connector(_NAME, "vmmkv.adapters.vllm.connector", _NAME)
    KVConnectorFactory.get_connector_class = classmethod(get_connector_class)
    install()


def options_of(transfer: Any) -> TierOptions:
    """The options in vLLM's `KVTransferConfig`. Raises: ValueError or TierUnavailable for what the connector cannot serve."""
    options = TierOptions.of(transfer.kv_connector_extra_config)
    if transfer.kv_role != "kv_both":
        raise ValueError(
            f'kv_role must be "kv_both" in --kv-transfer-config, and is "{transfer.kv_role}": each engine stores what it '
            "computes, and loads what tiers have"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            'kv_load_failure_policy must be "recompute" in --kv-transfer-config: with "fail", which is vLLM\'s default, a '
            "record that a tier has lost fails its request"
        )
    return options
