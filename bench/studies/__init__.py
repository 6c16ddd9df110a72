"""Studies that train for minutes to hours: effects of lossy settings on training, and published claims."""
