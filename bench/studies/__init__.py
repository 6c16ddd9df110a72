"""Studies that train for minutes to hours: how lossy settings change training, and published claims."""
