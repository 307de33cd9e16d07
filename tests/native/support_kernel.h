/* What kernels do, and emulators of processors that stand in for one (qemu-user) do not. Each asks the kernel, once,
 * and prints what is not there: cases that are about that are skipped, or leave out a part. */
#ifndef AIOVERBS_TESTS_SUPPORT_KERNEL_H
#define AIOVERBS_TESTS_SUPPORT_KERNEL_H

#include <stdbool.h>

/* madvise(MADV_DONTFORK) keeps pages from children. */
bool kernel_keeps_pages_from_children(void);

/* madvise(MADV_POPULATE_READ) fails where nothing is mapped, be it that the kernel does not know it. */
bool kernel_tells_what_is_mapped(void);

/* There is process_vm_readv, whether or not this process may use it on others. */
bool kernel_reads_other_processes(void);

/* Descriptors that recvmsg has no room for are closed. */
bool kernel_closes_what_finds_no_room(void);

/* madvise(MADV_REMOVE) takes pages back, or fails. */
bool kernel_takes_pages_back(void);

/* mmap looks at the size of huge pages that it is asked for: there are none of 1 MiB. */
bool kernel_knows_sizes_of_pages(void);

#endif
