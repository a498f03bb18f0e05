"""What a training process uses, whoever wrote it: heartbeat, signals, failure records. Standard library only."""
