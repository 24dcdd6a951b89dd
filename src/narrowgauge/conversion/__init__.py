"""Conversion: a training state taken from one storage, or from another library, into any storage.

Float32 holds whatever a storage keeps (of expansions, all but bits below its own last one), so a state is read as float32
and cut once more: exactly where the new code can hold the value, else weights to the nearest and moments as their code
says, and every loss is counted. What keeps its row keeps its very words. ``source`` is a state as it was found, ``foreign``
and ``folders`` read it, ``states`` takes it over, ``report`` says what that cost.
"""
