"""Tags on physical pages of a KV cache, checked before and after a step reads them. Imports no engine."""
