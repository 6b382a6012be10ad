"""What server, edges and cloud agree on: the model, where it may be cut, how it is trained; and an edge's data."""

from functools import cache

from torch import nn

from socflower import LabelledData, LayeredProgram, build_model, iid_partition, load_data, sgd

SHAPE = (1, 28, 28)


def load_model() -> nn.Module:
    return build_model("vgg-tiny", in_channels=1, image_size=28, num_classes=10, seed=1)


program = LayeredProgram(model_fn=load_model, example=SHAPE, optimizer=sgd(0.02, momentum=0.5))


@cache
def load_samples(party: int, num_parties: int) -> LabelledData:
    data = load_data("digits").train
    return data.select(iid_partition(len(data), num_parties, seed=1)[party])
