"""What interruptions cost: checkpoints, goodput, spot markets, dollars and days."""
