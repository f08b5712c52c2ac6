"""Names and shapes against compressed-tensors itself, which gives a model the parameters that it would load."""

import numpy as np
import pytest
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from quantkit.engines.kv_use import Attention, KvScales
from quantkit.kv_scales.spelling import LayerScales, config_section, scale_tensors
from tests.tiny import tiny_config


@pytest.mark.parametrize("scope", ["tensor", "head"])
def test_names_and_shapes_are_those_of_compressed_tensors(scope):
    config = tiny_config("glm4_moe")
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**{key: config[key] for key in config if key != "model_type"}))
    kind = KvScales(
        family="glm4_moe",
        model_type="glm4_moe",
        attention=Attention.GROUPED,
        spelling="compressed-tensors",
        scope=scope,
    )
    section = {"quant_method": "compressed-tensors", "config_groups": {}, **config_section(kind)}
    apply_quantization_config(model, QuantizationConfig.model_validate(section))
    expected = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name.endswith(("k_scale", "v_scale"))
    }
    ones = np.ones(2 if scope == "head" else 1, np.float32)
    layers = [LayerScales(layer=n, module=f"model.layers.{n}.self_attn", k=ones, v=ones) for n in (0, 1)]
    assert {name: array.shape for name, array in scale_tensors(layers, kind).items()} == expected
    assert len(expected) == 4
