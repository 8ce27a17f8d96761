"""From an experiment file to a run folder: what to record, what to replay, and where the results lie."""
