"""Room for what goes from one decoder layer to the next where a model runs layer by layer: known without torch."""

FLOAT32_BYTES = 4


def state_bytes(num_tokens: int, width: int, *, value_bytes: int = FLOAT32_BYTES) -> int:
    """States before and after a layer and the input of its experts, and their answers, which are float32."""
    return num_tokens * width * (3 * value_bytes + FLOAT32_BYTES)
