"""A stand-in for Pointcept's CUDA extension, which Point Transformer V3 never calls: it raises when it is."""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> object:
        raise NotImplementedError(f"pointops.{name} is a CUDA extension, which these tests do without")

    return missing
