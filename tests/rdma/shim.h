/* Thread domains, parent domains, XRC domains and imported contexts for a provider without them.
 *
 * Kernel soft-RoCE answers EOPNOTSUPP for all of them. This test-only library puts its ops into the provider's
 * `struct verbs_context`, as libibverbs created it, so that the calling convention, lifetime and order of the
 * documented verbs are tested there: ibv_alloc_td(3), ibv_alloc_parent_domain(3), ibv_open_xrcd(3). No queue becomes
 * faster.
 *
 * The library serves one context at a time. `shim_lock` guards every variable and every object; it is never held
 * while a caller's allocator runs. */
#ifndef AIOVERBS_TESTS_SHIM_H
#define AIOVERBS_TESTS_SHIM_H

#include "abi/libibverbs.h"

#include <stdbool.h>

/* -- For the tests ----------------------------------------------------------------------------- */

/* Live objects, and calls of callers' allocators since the installation. */
struct shim_counts {
    uint32_t tds;
    uint32_t parents;
    uint32_t xrcds;
    uint32_t xrc_domains; /* several `struct ibv_xrcd` may refer to one domain */
    uint32_t alloc_calls;
    uint32_t free_calls;
};

/* Sets the ops of a live context and replaces `*slot`, an `int (*)(struct ibv_pd *)` that all callers of
 * ibv_dealloc_pd use for PDs that may be parent domains. Returns 0, EBUSY (already installed), EINVAL, or EOPNOTSUPP
 * (the context is too old for the ops). No verb may run on the context meanwhile. */
int shim_install(struct verbs_context *context, void **slot);

/* Restores the ops while the context is still open. Returns 0, EBUSY (a shim's object is alive, which only the shim
 * can destroy) or EINVAL (not installed). */
int shim_uninstall(void);

void shim_counts(struct shim_counts *counts);

/* Changes the number of queues that count as associated with an XRC domain, since rxe has no XRC queues. Returns 0
 * or EINVAL. */
int shim_associate(struct ibv_xrcd *address, int difference);

/* -- Contexts over another one's descriptor: ibv_import_device(3), ibv_import_pd(3) ----------------
 *
 * They are not installed by the above: the test puts them into the table of exported verbs, which
 * has them before there is any context. They serve any number of contexts of soft-RoCE. */

struct ibv_context *shim_import_device(int cmd_fd);
struct ibv_pd *shim_import_pd(struct ibv_context *context, uint32_t handle);
void shim_unimport_pd(struct ibv_pd *pd);

/* Number of successful calls. */
struct shim_imports {
    uint32_t devices;
    uint32_t pds;
    uint32_t unimported;
};

void shim_count_imports(struct shim_imports *imports);

/* -- Between the shim's own files -------------------------------------------------------------- */

enum kind { TD, PARENT, XRCD };

struct xrc_domain;

struct object {
    union {
        struct ibv_td td;
        struct ibv_pd pd;
        struct {
            struct ibv_xrcd xrcd;
            /* libibverbs reads these when a queue is created on the domain. The kernel does not know the handle, and
             * rejects it. */
            uint32_t comp_mask;
            uint32_t handle;
        };
    }; /* first member: the caller's pointer is the object's address */
    enum kind kind;
    struct object *next;

    /* For a parent domain. */
    struct ibv_pd *base;
    struct ibv_td *thread_domain;
    void *(*alloc)(struct ibv_pd *, void *, size_t, size_t, uint64_t);
    void (*free)(struct ibv_pd *, void *, void *, uint64_t);
    void *pd_context;
    void *control_page;
    bool page_is_ours;

    /* For an XRC domain. */
    struct xrc_domain *domain;
    unsigned int associated;
};

extern pthread_mutex_t shim_lock;
extern struct object *shim_objects;
extern uint32_t shim_alloc_calls, shim_free_calls;
extern int (*shim_original_dealloc_pd)(struct ibv_pd *);
extern struct ibv_cq_ex *(*shim_original_create_cq_ex)(struct ibv_context *, struct ibv_cq_init_attr_ex *);

/* Called with `shim_lock` held. `shim_add` returns NULL without memory; `shim_drop` frees nothing. */
struct object *shim_find(enum kind kind, const void *address);
struct object *shim_add(enum kind kind);
void shim_drop(struct object *object);

/* Returns NULL, with errno set. */
void *shim_refused(int error);

struct ibv_td *shim_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int shim_dealloc_td(struct ibv_td *address);
struct ibv_pd *shim_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);
int shim_dealloc_pd(struct ibv_pd *pd);
struct ibv_cq_ex *shim_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
struct ibv_xrcd *shim_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int shim_close_xrcd(struct ibv_xrcd *address);

#endif
