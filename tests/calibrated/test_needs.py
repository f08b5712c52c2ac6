"""What `plan --method` says will be needed is what a run asks for, writes and holds."""

import json
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantkit.calibrated.convert import with_calibration
from quantkit.calibrated.make import WordsRequest, made_words
from quantkit.calibrated.memory import matrices_bytes, weights_bytes
from quantkit.calibrated.modules import decoded_plan
from quantkit.calibrated.needs import calibration_needs, check_disk, model_memory_bytes
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.errors import ResourceError
from quantkit.gptq.stream import stream_words
from quantkit.machine import bytes_text
from quantkit.plan.resources import disk_bytes
from quantkit.streaming import Tokens
from quantkit.streaming import experts as experts_module
from quantkit.streaming import model as model_module
from tests.cli.inside import refusal, run_inside
from tests.cli.test_commands import document
from tests.convert.plans import plan_of
from tests.gptq.test_stream import request
from tests.streaming.models import lively_checkpoint
from tests.tiny import EXPERTS, HIDDEN

TOKENS = Tokens(ids_NS=np.random.default_rng(5).integers(0, 128, (12, 24)))


class BegunError(Exception):
    """Raised where a run has done a layer: what it leaves then is kept."""


def planned(source, capsys, *options):
    """The ways that `plan --json` tells, in the schema."""
    run_inside("plan", source, "--to", "int4", "--json", *options)
    result = subprocess.CompletedProcess([], 0, stdout=capsys.readouterr().out)
    return document(result, "plan")["needs"]["calibration"]["ways"]


def words_request(plan, target, *, streaming=True):
    def begin(stage, done):
        if done:
            raise BegunError

    conversion = Conversion(
        plan=with_calibration(plan, TOKENS, streaming=streaming), target=target, num_jobs=1, report_progress=begin
    )
    return WordsRequest(conversion=conversion, tokens=TOKENS)


def test_files_of_words_are_as_large_as_planned(tmp_path, capsys):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa", mtp=True)
    plan = plan_of(tmp_path / "source", method="gptq")
    one = words_request(plan, tmp_path / "out")
    quiet = replace(one, conversion=replace(one.conversion, report_progress=lambda _, __: None))
    with made_words(quiet) as words:
        written = sum(path.stat().st_size for path in words.directory.glob("*.safetensors"))
        check_disk(calibration_needs(plan)[0], tmp_path / "out", num_tokens=10**12)  # they are there
    here, _ = planned(tmp_path / "source", capsys, "--method", "gptq")
    assert here["words_bytes"] == written


def test_a_run_asks_for_the_disk_that_the_plan_says(tmp_path, capsys, monkeypatch):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    plan = plan_of(tmp_path / "source", method="gptq")
    way, _ = planned(tmp_path / "source", capsys, "--method", "gptq")
    assert way["streaming"]
    needed = way["words_bytes"] + max(TOKENS.ids_NS.size * way["token_bytes"], disk_bytes(plan))
    monkeypatch.setattr("quantkit.calibrated.needs.free_bytes", lambda _: needed - 1)
    one = words_request(plan, tmp_path / "out")
    with pytest.raises(ResourceError) as caught, made_words(one):
        pass
    assert f"need {bytes_text(needed)} and {bytes_text(needed - 1)} are free" in caught.value.message
    assert not (tmp_path / "out.words").exists()
    monkeypatch.setattr("quantkit.calibrated.needs.free_bytes", lambda _: needed)
    with pytest.raises(BegunError), made_words(one):
        pass
    # what an interrupted run has left is counted, and is there
    there = sum(path.stat().st_size for path in (tmp_path / "out.words").rglob("*") if path.is_file())
    assert there > TOKENS.ids_NS.size * 4 * HIDDEN
    monkeypatch.setattr("quantkit.calibrated.needs.free_bytes", lambda _: needed - there)
    with pytest.raises(BegunError), made_words(one):
        pass


def test_a_plan_for_an_output_asks_for_the_words_as_well(tmp_path, tiny_checkpoint, monkeypatch):
    source = tiny_checkpoint().directory
    least = min(way.disk_bytes(0) for way in calibration_needs(plan_of(source, method="gptq")))
    command = ["plan", source, "--method", "gptq", "-o", tmp_path / "out"]
    monkeypatch.setattr("quantkit.calibrated.needs.free_bytes", lambda _: least - 1)
    assert refusal(*command).exit_code == 5
    monkeypatch.setattr("quantkit.calibrated.needs.free_bytes", lambda _: least)
    assert run_inside(*command) == 0


def test_the_decoded_source_is_as_large_as_planned(tmp_path, tiny_checkpoint, capsys):
    source = tiny_checkpoint(mtp=True).directory
    _, way = planned(source, capsys, "--method", "gptq")
    assert not way["streaming"]
    convert_checkpoint(
        Conversion(plan=decoded_plan(plan_of(source, method="gptq")), target=tmp_path / "decoded", num_jobs=1)
    )
    files = [path for path in (tmp_path / "decoded").iterdir() if path.is_file()]
    held = sum(path.stat().st_size for path in files if path.suffix == ".safetensors")
    assert way["memory_bytes"] == model_memory_bytes(held) > held
    assert held < sum(path.stat().st_size for path in files) <= way["decoded_bytes"] < held + (2 << 20)
    plain = tiny_checkpoint("plain", source_format="bf16").directory
    (way,) = planned(plain, capsys, "--method", "awq")
    assert way["decoded_bytes"] == 0
    assert way["memory_bytes"] == model_memory_bytes(sum(path.stat().st_size for path in plain.glob("*.safetensors")))


def test_tokens_are_wanted_for_every_expert_and_ways_are_those_that_there_are(tiny_checkpoint, capsys):
    source = tiny_checkpoint().directory
    here, elsewhere = planned(source, capsys, "--method", "gptq")
    assert here["wanted_tokens"] == HIDDEN * EXPERTS // 2  # two experts a token
    assert elsewhere["wanted_tokens"] == HIDDEN  # every expert is fed every token
    assert here["token_bytes"] == 16 * HIDDEN
    (awq,) = planned(source, capsys, "--method", "awq")
    assert (awq["streaming"], awq["wanted_tokens"]) == (False, None)
    assert 0.66 < awq["words_bytes"] / elsewhere["words_bytes"] < 0.68  # up and down, and not gate
    for options, way in (["--streaming", "--text", "x"], here), ([], elsewhere):
        run_inside("convert", source, "--dry-run", "--method", "gptq", "--json", *options)
        assert json.loads(capsys.readouterr().out)["needs"]["calibration"] == {"method": "gptq", "ways": [way]}
    assert not calibration_needs(plan_of(source))


def test_needs_are_told_without_torch(tiny_checkpoint, tmp_path):
    program = "import sys\nfrom quantkit.cli.app import app\napp(sys.argv[1:], standalone_mode=False)\n"
    program += "assert not {'torch', 'transformers'} & set(sys.modules)"
    arguments = ["plan", tiny_checkpoint().directory, "--method", "gptq", "--summary", tmp_path / "s.md"]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    needs = result.stdout.partition("Needs of --method gptq\n")[2].partition("\n\n")[0]
    assert [line.split()[-2:] for line in needs.splitlines()[:2]] == [["--streaming", "llm-compressor"], ["512", "256"]]
    summary = (tmp_path / "s.md").read_text()
    assert "\nNeeds of --method gptq\n\n| what | --streaming | llm-compressor |\n" in summary
    assert "| tokens that it wants | 512 | 256 |" in summary


class LiveMatrices(TorchDispatchMode):
    """Bytes of float64 matrices that live, and the most there were; of the thread that enters."""

    def __init__(self):
        super().__init__()
        self._alive, self.most = weakref.WeakSet(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64 and one.dim() == 2:
                self._alive.add(one.untyped_storage())
        self.most = max(self.most, sum(storage.nbytes() for storage in self._alive))
        return made


@pytest.mark.parametrize("dense", [{}, {"model.layers.0.self_attn.o_proj": (HIDDEN, 128)}])
def test_memory_stays_below_what_is_said(dense, tmp_path, monkeypatch):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    one = request(tmp_path / "source", tmp_path / "words", dense=dense)
    weights, most = weakref.WeakSet(), 0

    def watch(module):
        decode = module.decode_weight

        def watched(weight):
            nonlocal most
            value = decode(weight)
            weights.add(value.untyped_storage())
            most = max(most, sum(storage.nbytes() for storage in weights))
            return value

        monkeypatch.setattr(module, "decode_weight", watched)

    watch(experts_module)
    watch(model_module)
    with LiveMatrices() as matrices:
        stream_words(one)
    said = matrices_bytes(one.shapes)
    assert 0.5 * said < matrices.most <= said
    said = weights_bytes(one.model.binding.weights.values())
    assert 0.4 * said < most <= said
