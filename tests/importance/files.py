"""Files of second moments as their own writers make them: the gguf package, the order of llama.cpp's C++, safetensors.

An entry is (moments [E, C] or [C] as means over tokens, tokens of each row). Legend: E experts, C channels.
"""

import struct

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import save_file

LAYER = "model.layers.1.mlp.experts"
WIDTHS = {"gate": 256, "up": 256, "down": 128}
TOKENS = [900, 10, 0, 31]  # many, few, none, just too few


def expert_entries(tokens=TOKENS, *, layer=1, seed=3, spread=1.5):
    """Of the experts of a layer of the tiny checkpoint; gate and up have one input."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, width in WIDTHS.items():
        moments = np.exp(spread * rng.normal(size=(len(tokens), width))).astype(np.float32)
        moments = found[f"blk.{layer}.ffn_gate_exps"][0] if name == "up" else moments
        found[f"blk.{layer}.ffn_{name}_exps"] = (moments, list(tokens))
    return found


def write_gguf(path, entries, *, kind="imatrix", changes=None):
    """``changes``: tensors to put beside or in the place of others; None leaves one out."""
    tensors = {}
    for name, (moments, tokens) in entries.items():
        counts = np.array(tokens, np.float32).reshape(-1, 1)
        tensors[f"{name}.weight.in_sum2"] = (moments.reshape(len(counts), -1) * counts).astype(np.float32)
        tensors[f"{name}.weight.counts"] = counts
    writer = GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["calibration.txt", "more.txt"])
    writer.add_uint32("imatrix.chunk_count", 30)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, tensor in (tensors | (changes or {})).items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path, entries, *, chunk=512, ending=True):
    """As save_imatrix_legacy: mean squares times calls; one for every channel of an expert without tokens."""
    out = struct.pack("<i", len(entries))
    for name, (moments, tokens) in sorted(entries.items()):
        calls = -(-max(tokens) // chunk)
        rows = moments.reshape(len(tokens), -1)
        seen = np.array(tokens)[:, None] > 0
        values = (np.where(seen, rows, np.float32(1)) * np.float32(calls)).astype("<f4")
        text = f"{name}.weight".encode()
        out += struct.pack("<i", len(text)) + text + struct.pack("<ii", calls, values.size) + values.tobytes()
    if ending:
        out += struct.pack("<ii", 30, 15) + b"calibration.txt"
    path.write_bytes(out)
    return path


def write_statistics(path, entries, *, model, layer=1):
    """As quantkit calibrate: gate and up share a tensor, all experts a count."""
    parent = f"model.layers.{layer}.mlp.experts"
    gate, tokens = entries[f"blk.{layer}.ffn_gate_exps"]
    tensors = {
        f"{parent}.gate_up_proj.input_second_moment": gate,
        f"{parent}.down_proj.input_second_moment": entries[f"blk.{layer}.ffn_down_exps"][0],
        f"{parent}.token_count": np.array(tokens, np.int64),
    }
    save_file(tensors, path, {"format": "pt", "quantkit_statistics": "1", "model": model, "tokens": "941"})
    return path
