"""Catalogues that change with the market: accelerators, networks, prices, published recipes, each with its source."""
