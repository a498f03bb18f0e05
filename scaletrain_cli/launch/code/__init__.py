"""The user's own code: the working tree it comes from and the snapshot that is kept with a run."""
