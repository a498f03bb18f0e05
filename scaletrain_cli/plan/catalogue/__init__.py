"""Data that changes with the market, each entry with its source: accelerators, networks, prices, published recipes."""
