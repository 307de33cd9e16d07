"""What `aioverbs demo` is made of: a storage server, its clients, and who watches them, in a process each.

data_set      what the files are, and whether what came back is what was made
storage       the storage server: where it lies, starting it, what it counts
children      processes that end when this one does, and are missed when they end before
tethered      what such a process runs first
client        a client's process: `loading` has what it does with files, `misuse` the call from a wrong loop
staff         the clients, from this side
course        the demonstration, from its beginning to its end
progress      how it goes, shown
outcome       what came of it
summary       the same, for people
"""
