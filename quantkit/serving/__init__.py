"""Launch lines of pools of servers, each checked against the engine's contract and a memory plan of its own."""
