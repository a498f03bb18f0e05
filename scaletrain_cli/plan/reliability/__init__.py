"""The cost of interruptions: checkpoints, goodput, spot markets, dollars and days."""
