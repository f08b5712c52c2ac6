"""Names of requests, which engines take from their users, as a log or a terminal may show them. Imports no torch."""

import json


def one_line(name: str) -> str:
    """What ends a line, moves a cursor or turns text round is spelled out as JSON does."""
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in name)
