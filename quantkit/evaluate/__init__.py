"""How far an output's predictions lie from its source's: both are run over the same tokens, layer by layer."""
