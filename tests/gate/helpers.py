"""Writes sample logs."""

import json


def harness_line(doc_id, metrics, **fields):
    """As lm_eval writes it, shortened."""
    return {
        "doc_id": doc_id,
        "doc": {"question": f"what is {doc_id}?"},
        "target": "4",
        "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": ["\n"]}}},
        "resps": [["4"]],
        "filtered_resps": ["4"],
        "filter": "none",
        "metrics": list(metrics),
        "doc_hash": f"d{doc_id}",
        "prompt_hash": f"p{doc_id}",
        "target_hash": "t",
        **metrics,
        **fields,
    }


def harness_log(directory, task, scores, *, metric="acc", **fields):
    """The file of a task in the folder of a model."""
    path = directory / "org__model" / f"samples_{task}_2026-05-01T10-20-30.123456.jsonl"
    lines = [harness_line(index, {metric: score}, **fields) for index, score in enumerate(scores)]
    return write_lines(path, lines)


def plain_log(path, scores, **fields):
    """Lines of id and correct."""
    return write_lines(path, [{"id": index, "correct": score, **fields} for index, score in enumerate(scores)])


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def flipped(num_questions, num_lost, num_gained):
    """Scores before and after."""
    before = [1] * (num_questions - num_gained) + [0] * num_gained
    after = [0] * num_lost + [1] * (num_questions - num_lost)
    return before, after
