"""How weights change: optimizer, schedule, clipping, loss scale, averaging. Knows no data and no models."""
