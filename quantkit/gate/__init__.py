"""Do two evaluations of the same questions differ? Sample logs, paired statistics, a verdict."""
