/* Features of kernels that emulators of processors (qemu-user) may lack. Each function asks the kernel once, and prints
 * a missing feature: cases that need it are skipped, or leave out a part. */
#ifndef AIOVERBS_TESTS_SUPPORT_KERNEL_H
#define AIOVERBS_TESTS_SUPPORT_KERNEL_H

#include <stdbool.h>

/* madvise(MADV_DONTFORK) keeps pages from children. */
bool kernel_keeps_pages_from_children(void);

/* madvise(MADV_POPULATE_READ) fails where nothing is mapped, also if the kernel does not know it. */
bool kernel_tells_what_is_mapped(void);

/* process_vm_readv exists, whether or not this process may use it on others. */
bool kernel_reads_other_processes(void);

/* recvmsg closes descriptors for which there is no room. */
bool kernel_closes_what_finds_no_room(void);

/* madvise(MADV_REMOVE) frees pages, or fails. */
bool kernel_takes_pages_back(void);

/* mmap checks the size of huge pages: there are none of 1 MiB. */
bool kernel_knows_sizes_of_pages(void);

#endif
