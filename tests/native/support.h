/* All that the native tests share. Included before anything else, for _GNU_SOURCE. */
#ifndef AIOVERBS_TESTS_SUPPORT_H
#define AIOVERBS_TESTS_SUPPORT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "soft/api/device.h"
#include "support_check.h"
#include "support_home.h"
#include "support_pair.h"
#include "support_wait.h"
#include "support_work.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

#endif
