"""How much each input channel matters: second moments from files that others made, read a row at a time."""
