/* What is to be a C integer is a Python one, or has `__index__`: everywhere in what Cython makes of this project.
 *
 * Where an argument is no `int`, Cython's conversion calls `__int__`, which cuts a float off: 1.5 places would be 1. It
 * asks for that by the slot's name in one function, which this makes take the other slot. What has none is refused, with
 * a TypeError. */
#ifndef AIOVERBS_WHOLE_NUMBERS_H
#define AIOVERBS_WHOLE_NUMBERS_H

/* Python.h, which declares the slots, comes before: every file that Cython makes begins with it. */
#define nb_int nb_index

#endif
