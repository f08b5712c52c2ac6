"""Names of files that more than one module speaks of, each once."""

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"  # where ModelOpt declares its quantization
MANIFEST_NAME = "conversion.json"  # by which a whole output is known
README_NAME = "README.md"
SOURCE_README_NAME = "SOURCE_README.md"  # the source's card must not pass for the card of the output
RUN_NAME = "run.json"  # by which a run is known
HUB_CLIENT_NAME = ".cache"  # where the hub's client keeps begun downloads, in a directory that it fills
BEGUN_NAME = "begun.json"  # by which a run beside its output is known
WORDS_SUFFIX = ".words"  # of a directory beside an output, in which is kept what calibration chose
WORDS_NAME = "words.json"  # by which such a directory is complete
