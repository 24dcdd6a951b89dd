from .hub import RunNotice as RunNotice
