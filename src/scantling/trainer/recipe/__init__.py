"""Recipe of a run: schema, loading and checks."""

from scantling.trainer.recipe.loading import (
    apply_override,
    check_recipe,
    differences,
    dump_recipe,
    load_recipe,
    read_yaml,
)
from scantling.trainer.recipe.schema import Recipe

__all__ = ["Recipe", "apply_override", "check_recipe", "differences", "dump_recipe", "load_recipe", "read_yaml"]
