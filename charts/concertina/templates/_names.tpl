{{- define "concertina.name" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains $chart .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $chart | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- /* The operator's own, or one that somebody else makes. */ -}}
{{- define "concertina.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "concertina.name" .) }}
{{- end -}}

{{- /* Of (list IMAGE APPVERSION): a digest is the whole truth, so a tag beside it would only be for people. */ -}}
{{- define "concertina.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default (index . 1) $image.tag) }}
{{- end -}}
{{- end -}}

{{- define "concertina.selector" -}}
app.kubernetes.io/name: concertina-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "concertina.labels" -}}
{{ include "concertina.selector" . }}
app.kubernetes.io/part-of: concertina
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Each release has its own: operators that have one in common take turns, whatever namespaces they serve. */ -}}
{{- define "concertina.lease" -}}
{{ include "concertina.name" . }}-operator
{{- end -}}

{{- define "concertina.masterKeySecret" -}}
{{ .Values.masterKey.existingSecret | default (printf "%s-master-key" (include "concertina.name" .)) }}
{{- end -}}

{{- /* What the operator may do where TrainingJobs are: each verb is one that it uses. */ -}}
{{- define "concertina.jobRules" -}}
- apiGroups: [concertina.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete] # delete: ttlSecondsAfterFinished
- apiGroups: [concertina.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [concertina.dev]
  resources: [trainingjobs/finalizers] # OwnerReferencesPermissionEnforcement requires it, because pods block the deletion of their job
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete] # patch: the operator ends pods of a failed job in place, which keeps their logs
- apiGroups: [""]
  resources: [secrets] # the operator writes a job's certificates, and never reads them
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- if eq (include "concertina.clusterMode" .) "true" }}
- apiGroups: [scheduling.k8s.io, scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups] # for jobs with spec.scheduling.gang; patch: for a change of minReplicas
  verbs: [get, create, patch, delete]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims, resourceclaimtemplates] # to count the GPUs of the template's claims for workersPerReplica: Auto
  verbs: [get]
- apiGroups: [kueue.x-k8s.io] # see docs/queues.md; unused without Kueue
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}
{{- end -}}

{{- /* Without nodes and with named namespaces the operator needs nothing that belongs to the whole cluster. */ -}}
{{- define "concertina.clusterMode" -}}
{{- if or .Values.nodes.enabled (not .Values.watchNamespaces) -}}true{{- end -}}
{{- end -}}

{{- /* How whoever asks for the operator's metrics is authenticated: a word of CONCERTINA_METRICS_ACCESS. */ -}}
{{- define "concertina.metricsAccess" -}}
{{- if .Values.metrics.open -}}
Open
{{- else if or .Values.metrics.tokenSecret (not (include "concertina.clusterMode" .)) -}}
Token
{{- else -}}
Review
{{- end -}}
{{- end -}}

{{- define "concertina.metricsReader" -}}
{{ include "concertina.name" . }}-metrics-reader
{{- end -}}

{{- /* The Secret with the token that monitors show; empty where none is asked for. */ -}}
{{- define "concertina.metricsSecret" -}}
{{- $access := include "concertina.metricsAccess" . -}}
{{- if eq $access "Token" -}}
{{ .Values.metrics.tokenSecret }}
{{- else if eq $access "Review" -}}
{{ include "concertina.metricsReader" . }}
{{- end -}}
{{- end -}}

{{- /* What the operator may do in the whole cluster; empty in the namespaced mode. */ -}}
{{- define "concertina.clusterRules" -}}
{{- if .Values.nodes.enabled -}}
- apiGroups: [""]
  resources: [nodes] # to notice nodes that have failed or are about to stop
  verbs: [get, list, watch]
{{ end -}}
{{- if eq (include "concertina.clusterMode" .) "true" -}}
- apiGroups: [kueue.x-k8s.io] # to read the nodes of a queue's quota, and priorities
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [list, watch]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [list, watch]
{{ end -}}
{{- if .Values.namespaceSelector -}}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get, list, watch]
{{ end -}}
{{- if eq (include "concertina.metricsAccess" .) "Review" -}}
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{ end -}}
{{- if not .Values.watchNamespaces -}}
{{ include "concertina.jobRules" . }}
{{- end -}}
{{- end -}}
