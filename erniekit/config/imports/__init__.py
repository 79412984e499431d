"""Convert the configurations of other programs that train speech models to one of ours: `erniekit import`.

Each module has a table with a row for every key of one program's configuration, and its default there: which parameter
takes the value, which values are accepted because they ask for what is done here anyway, or why it has no effect. A key
that no table has is an error, and so is a value that asks for what is not built.
"""
