"""The trainer behind `scantling train`: recipe, data, tasks, models, planning, training, sweeping, reporting."""
