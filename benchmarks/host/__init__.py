"""What the engine's own work takes in a step: everything real but the model, whose passes cost a clock's time alone."""
