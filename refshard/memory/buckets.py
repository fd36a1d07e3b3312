"""DDP's buckets of gradients, as they fill up."""

from refshard.estimate.recipe import Recipe


class Buckets:
    """One backward's buckets, each full with the gradient that reaches its limit; the first one's limit is lower.

    Gradients, of ``element_bytes`` an element, enter in the reverse of the parameters' order.
    """

    def __init__(self, recipe: Recipe, element_bytes: int) -> None:
        self._recipe, self._element = recipe, element_bytes
        self._limit = recipe.first_bucket_bytes
        self._filled = 0

    def add(self, numel: int) -> int:
        """Elements of the bucket that a gradient of ``numel`` elements fills; 0 if there is room left."""
        self._filled += numel
        if self._filled * self._element < self._limit:
            return 0
        self._limit = self._recipe.bucket_bytes
        return self.take_rest()

    def take_rest(self) -> int:
        """Elements of the bucket that is not full; 0 if it is empty."""
        numel, self._filled = self._filled, 0
        return numel
