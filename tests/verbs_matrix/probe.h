/* The probe: results of each verb, on any device. A row tests one case in a process and with a context of its own,
 * so rows do not influence each other, and a crash or a hang is a result, too. */
#ifndef AIOVERBS_TESTS_PROBE_H
#define AIOVERBS_TESTS_PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "abi/libibverbs.h"
#include "abi/verbs_ops.h"

/* ---- Rows ------------------------------------------------------------------------------------------------- */

struct row {
    const char *verb, *asked;
    void (*run)(void);
    struct row *next;
};

void row_add(struct row *row);

#define ROW_JOIN_(a, b) a##b
#define ROW_JOIN(a, b) ROW_JOIN_(a, b)

/* ROW(verb, "case") { ... } */
#define ROW(verb_, asked_) ROW_AS(verb_, asked_, ROW_JOIN(row_, __LINE__))
#define ROW_AS(verb_, asked_, name)                                             \
    static void name(void);                                                     \
    __attribute__((constructor)) static void ROW_JOIN(add_, name)(void)         \
    {                                                                           \
        static struct row row = {.verb = #verb_, .asked = asked_, .run = name}; \
        row_add(&row);                                                          \
    }                                                                           \
    static void name(void)

#define ROWS_OF(array) (sizeof(array) / sizeof((array)[0]))

/* ---- The row's world: its process has no other ------------------------------------------------------------ */

extern struct ibv_context *context;
extern const struct verbs_table *verbs;
extern struct verbs_context *extended;

bool on_soft_device(void);

/* Another context of the same device. */
struct ibv_context *open_again(void);

/* A function of libibverbs that the library's table of verbs lacks; NULL on the software device. */
void *find_libibverbs_function(const char *name);

/* Calls an extended op if the context has it; otherwise `answer` is `absent` and errno is EOPNOTSUPP. */
#define CALL_OP(absent, op, ...) \
    (VERBS_HAS_OP(extended, op) ? extended->op(__VA_ARGS__) : (errno = EOPNOTSUPP, (absent)))

/* ---- Answers ---------------------------------------------------------------------------------------------- */

/* Prints words of the result. */
__attribute__((format(printf, 1, 2))) void report(const char *format, ...);
_Noreturn void finish(void); /* ends the row: the result is complete */

const char *status_name(enum ibv_wc_status status);
const char *state_name(enum ibv_qp_state state);

/* for verbs that return an errno, or -1 and set errno: prints "0" or the errno's name */
int report_int(int answer);
/* for verbs that return an object, or NULL and set errno: prints "ok" or the errno's name */
void *report_object(const void *object);
#define REPORT_OBJECT(call) (errno = 0, report_object(call))
#define REPORT_INT(call) (errno = 0, report_int(call))

/* Checks a precondition of a row: if it failed, prints that as the result, and ends the row. */
void *require_object(const void *object);
void require_int(int answer);
#define REQUIRE_OBJECT(call) (errno = 0, require_object(call))
#define REQUIRE_INT(call) (errno = 0, require_int(call))

/* ---- Objects ---------------------------------------------------------------------------------------------- */

#define ALL_REMOTE (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define ALL_ACCESS (IBV_ACCESS_LOCAL_WRITE | ALL_REMOTE)
#define MEMORY_BYTES (64u << 10)
#define QKEY 0x1234u

struct ibv_pd *domain(void); /* the protection domain of all objects */
uint8_t *pages(size_t size); /* zeroed, page-aligned */
struct ibv_mr *region(int access);
struct ibv_cq *queue(int cqe);
struct ibv_srq *shared_queue(uint32_t depth);
struct ibv_qp_init_attr qp_attr(enum ibv_qp_type type); /* with queues of its own for 16 requests each */
struct ibv_device_attr device_attr(void);

struct end {
    struct ibv_qp *qp;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_mr *mr; /* covers all of the memory, with all access */
    uint8_t *memory;
};
extern struct end a, b;

/* Attributes for pairs; a row may change them before it creates one. */
extern struct ibv_qp_attr link_attr;
extern struct ibv_qp_init_attr pair_attr;
extern struct ibv_srq *pair_srq;
extern struct ibv_pd *pair_pd_of_b;

void make_end(struct end *end, enum ibv_qp_type type);
void make_pair(enum ibv_qp_type type); /* a and b, connected, in RTS */

struct ibv_ah_attr path_to_self(void);
struct ibv_ah *handle_to_self(void);

/* ---- States ----------------------------------------------------------------------------------------------- */

/* The attribute mask that a type requires for the step to INIT, RTR or RTS; for other states, the state alone. */
int mask_to(enum ibv_qp_type type, enum ibv_qp_state state);
int step(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t dest_qp_num);
int step_as(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t dest_qp_num, struct ibv_qp_attr attr, int mask);
void move_to_state(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t dest_qp_num); /* from RESET on */
enum ibv_qp_state state_of(struct ibv_qp *qp);

/* ---- Work ------------------------------------------------------------------------------------------------- */

/* A signalled request of `length` bytes from the beginning of `from`'s memory to the same place at `to`. Valid until
 * seven more requests were made. */
struct ibv_send_wr *request(enum ibv_wr_opcode opcode, struct end *from, struct end *to, uint32_t length);
int post(struct end *end, struct ibv_send_wr *wr);
int post_receive(struct end *end, uint32_t length);
int post_receive_list(struct end *end, struct ibv_sge *list, int count);
int post_shared(struct ibv_srq *srq, uint32_t length);

/* Waits for a completion; returns false on timeout. */
bool wait_wc(struct ibv_cq *cq, struct ibv_wc *wc);
void require_success(struct ibv_cq *cq, unsigned int count);
void report_statuses(struct ibv_cq *cq, unsigned int count);    /* prints "SUCCESS", or "none" */
void report_completions(struct ibv_cq *cq, unsigned int count); /* prints "SUCCESS SEND 8 imm" */
void report_no_completion(struct ibv_cq *cq);                   /* prints "none", or unexpected completions */
void report_event(void);                                        /* prints the next asynchronous event, or "no event" */
bool report_cq_event(struct ibv_comp_channel *channel);         /* prints "event" or "no event" */
void pause_ms(unsigned int milliseconds);
/* waits until the device is idle; for that time if idleness cannot be detected */
void wait_until_idle(unsigned int milliseconds);

#endif
