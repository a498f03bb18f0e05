"""How a model is cut over ranks: tensor, sequence, expert and pipeline parallelism. Knows no data, no optimizer."""
