"""Why a model is not computed here."""


class Unsupported(ValueError):
    """This model is none that the decoder computes; the text says why. transformers' own code may run it."""


class WeightsMismatch(ValueError):
    """The tensors of a directory are not those of the model that its configuration describes."""
