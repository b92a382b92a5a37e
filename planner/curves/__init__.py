"""Loss curves: forms, fits, drift of a training away from its fit, and the loss that inference sees (Viper)."""
