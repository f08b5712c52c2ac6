"""Where the text model begins, by names alone."""

import pytest

from quantkit.weights.completeness import root_of_names


@pytest.mark.parametrize(
    ("names", "root"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], "model."),
        (["vision.layers.0.norm", "language_model.model.embed_tokens.weight"], "language_model.model."),
        (["model.layers.61.embed_tokens.weight", "model.embed_tokens.weight"], "model."),
        (["layers.61.embed_tokens.weight", "layers.0.norm", "embed_tokens.weight"], ""),  # the draft's own stands first
        (["vision.layers.0.norm", "text.model.layers.10.norm", "text.model.layers.0.norm"], "text.model."),
        (["layers.0.norm"], "model."),
    ],
)
def test_the_text_model_begins_where_its_embedding_lies(names, root):
    assert root_of_names(names) == root
