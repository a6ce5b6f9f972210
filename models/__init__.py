"""Model families as data: config, parameter table and weight names over one decoder stack; checkpoints in and out."""
