"""Run a causal language model over many sequences with the weights of one decoder layer in memory at a time.

The layers are transformers' own classes. What is held: hidden states (in files, where a directory is given), one layer
without its experts, the next one, and two experts.
"""

from quantkit.streaming.experts import ExpertVisit
from quantkit.streaming.layer import StreamedLayer
from quantkit.streaming.model import StreamedModel, begin_states, open_model
from quantkit.streaming.observer import Observer
from quantkit.streaming.states import States, open_states
from quantkit.streaming.tokens import Tokens, read_tokens, tokenize, told_tokens

__all__ = [
    "ExpertVisit",
    "Observer",
    "States",
    "StreamedLayer",
    "StreamedModel",
    "Tokens",
    "begin_states",
    "open_model",
    "open_states",
    "read_tokens",
    "tokenize",
    "told_tokens",
]
