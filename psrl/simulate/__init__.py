"""What a step takes on N ranks: the real placement and plans of a trace, timed by a calibrated cost model. No torch."""
