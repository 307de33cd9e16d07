"""What the bridge needs of pyverbs to be imported, so that its stub can be checked where pyverbs is not."""


class Context:
    pass
