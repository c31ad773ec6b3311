"""Memory that vLLM's KV cache takes and gives back while it serves."""


def install() -> None:
    """Let engines of this process be elastic."""
    from vmmkv.adapters.vllm.elastic.engine import install

    install()
