"""Where a model's first weights come from, and how each rank gets its piece of them. Knows no data and no optimizer."""
