"""What SGLang and vLLM demand of a checkpoint, as data, and the checks that follow from it."""
