"""The preset models: parameter counts as published, names and sizes."""

from narrowgauge.spec.models import MODELS


def test_published_parameter_counts():
    published = {
        "llama-1b": 1_235_814_400,
        "llama-7b": 6_738_415_616,
        "llama-8b": 8_030_261_248,
        "llama-13b": 13_015_864_320,
        "llama-70b": 70_553_706_496,
        "gpt2-124m": 124_439_808,
    }
    assert {name: MODELS[name].num_parameters for name in published} == published
