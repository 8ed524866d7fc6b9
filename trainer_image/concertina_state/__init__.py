"""The state of a training job: boxes of global tensors, in node memory, on peers and in durable storage.

The bundled trainer keeps its state by it, and scripts do by `trainingjob.State`, in images of their own: Python 3.10+,
nothing beside it but `concertina_protocol`, obstore where there is durable storage, and torch where there are tensors.
"""
