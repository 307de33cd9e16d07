/* Convert Python objects to C integers by `__index__` only, in all code that Cython generates for this project.
 *
 * For an argument that is no `int`, Cython's conversion calls `__int__`, which truncates a float: 1.5 would become 1.
 * Cython's conversion function reads the type slot nb_int by its name; this macro makes it read nb_index instead. An
 * object without `__index__` is refused, with a TypeError. */
#ifndef AIOVERBS_WHOLE_NUMBERS_H
#define AIOVERBS_WHOLE_NUMBERS_H

/* Python.h, which declares the slots, is included before: every file that Cython generates begins with it. */
#define nb_int nb_index

#endif
