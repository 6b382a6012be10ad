"""How MNIST's 28 pixels enter models made for 32."""

from socflower.errors import ConfigError


def padding_to_32(model: str, image_size: int) -> int:
    """Return the zeros to add at each edge so that an image has 32 pixels per side.

    The first convolution adds them to its own padding: the same numbers as a padding layer in front, but one
    activation less to write, and nothing but convolutions for an integer engine to know.
    """
    if image_size not in (28, 32):
        raise ConfigError(f"model {model}: takes images of 28x28 or 32x32 pixels, got {image_size}x{image_size}")
    return (32 - image_size) // 2
